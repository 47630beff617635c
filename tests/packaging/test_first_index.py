"""docs/first-index.md does what it says: its blocks run in their order, in one shell, on a server of its own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from servers.postgres import embedded_postgres
from tests.packaging.page_script import run_script

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "first-index.md"
# The wait that the text asks of the reader, between the blocks.
COPYING = """
copying="SELECT count(*) FROM roir.resumable_operations WHERE state = 'running' AND phase = 'build' AND rows > 0"
for _ in $(seq 240); do
  [ "$(psql "$ROIR_DSN" -tAc "$copying")" = 1 ] && break
  sleep 0.5
done
"""
# `make -s java` prints what this does.
JAVA = str(ROOT / "scripts" / "ensure-java")


def as_script(page: str) -> str:
    """The section that is done by hand as one shell script: SQL goes to psql."""
    section = page[page.index("## Make one yourself") : page.index("## Next")]
    script = ["set -ex"]
    for language, block in re.findall(r"^```(sh|sql)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
        if language == "sql":
            script.append(f"psql \"$ROIR_DSN\" -v ON_ERROR_STOP=1 <<'END'\n{block}END")
        elif block.startswith("export ROIR_DSN="):
            # The reader's own server and environment.
            assert f"$(make -s {Path(JAVA).name.removeprefix('ensure-')})" in block
        elif block.strip() != 'psql "$ROIR_DSN"':
            script.append(block + (COPYING if block.rstrip().endswith("&") else ""))
    return "\n".join(script)


def unspaced(text: str) -> str:
    """The lines without the spaces at their ends."""
    return "\n".join(line.strip() for line in text.strip("\n").splitlines())


@pytest.mark.by_hand("sweeps")
def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    java = subprocess.run([JAVA], capture_output=True, text=True, check=True).stdout.strip()
    with embedded_postgres(18) as dsn:
        said = run_script(as_script(PAGE.read_text()), tmp_path, {"ROIR_DSN": dsn, "JAVA_HOME": java}, 600)
    # The page shows the real output, except for the spaces around it.
    for shown in re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        assert unspaced(shown) in unspaced(said)
    # The plan and the seal count alike.
    assert re.search(r"^segments +2, and one for keys that are NULL$", said, re.MULTILINE)
    assert "seal: segment 2 done, " in said
    # A query of the table looks into every partition, a query of the index into none.
    assert "\n120\n" in said
    plan = said[said.index("Index Only Scan") :]
    assert "orders_20" not in plan[: plan.index(" rows)")]
    # The verification, the build's own and that of the rebuild.
    assert said.count("missing 0, extra 0, different 0") >= 2
    # Eight orders of that customer, and the one that the update gave to that customer.
    assert re.search(r"\(9 rows\)", said)
    paused = re.search(r"paused at ([\d.]+) %", said)
    assert paused is not None
    assert 0 < float(paused.group(1)) < 100
    assert "dropped" in said.splitlines()[-1]
