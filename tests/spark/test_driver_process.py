"""The driver as a process of its own: its command line, its environment, its log, its end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest

from airflow_roir.errors import SparkFailed
from airflow_roir.spark.driver_process import ENDED, Driver, driver_command, driver_environment, driver_order
from airflow_roir.spark.options import SparkOptions

pytestmark = pytest.mark.sample(2)

SECRET = "postgresql://builder:hush@db/shop"


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


class Log:
    """Lines as they arrive, and a way to wait for one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._arrived = threading.Condition()

    def __call__(self, line: str) -> None:
        with self._arrived:
            self.lines.append(line)
            self._arrived.notify_all()

    def wait_for(self, found: Callable[[str], bool]) -> str:
        with self._arrived:
            assert self._arrived.wait_for(lambda: any(map(found, self.lines)), 30), self.lines
            return next(line for line in self.lines if found(line))


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def start(log: Log) -> Iterator[Callable[[str], Driver]]:
    drivers: list[Driver] = []

    def go(code: str) -> Driver:
        drivers.append(Driver(python(code), driver_environment(SECRET), log))
        return drivers[-1]

    yield go
    for driver in drivers:
        driver.kill()


def test_the_command_line_holds_names_and_numbers_only() -> None:
    options = SparkOptions("spark://h:7077", {"spark.executor.memory": "2g", "spark.app": "a b"})
    assert driver_command(options, driver_order('public."I x"', "airflow d r"))[1:] == [
        *("-m", "airflow_roir.spark", "--index", 'public."I x"', "--owner", "airflow d r"),
        *("--master", "spark://h:7077"),
        *("--conf", "spark.app=a b", "--conf", "spark.executor.memory=2g"),
    ]
    assert driver_command(SparkOptions(), driver_order("i", "o", take_over=True))[3:] == [
        *("--index", "i", "--owner", "o", "--take-over")
    ]


def test_the_dsn_travels_in_the_environment_and_airflows_secrets_stay_behind() -> None:
    environment = driver_environment(
        SECRET,
        {
            "PATH": "/bin",
            "AIRFLOW_HOME": "/a",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "x",
            "AIRFLOW_CONN_OTHER": "y",
            "AIRFLOW_VAR_KEY": "z",
        },
    )
    assert environment == {"PATH": "/bin", "AIRFLOW_HOME": "/a", "ROIR_DSN": SECRET, "PYTHONUNBUFFERED": "1"}


def test_a_running_driver_shows_no_secret_in_the_process_list(start: Callable[[str], Driver], log: Log) -> None:
    driver = start("import os, time; print('has', len(os.environ['ROIR_DSN'])); time.sleep(600)")
    log.wait_for(lambda line: line == f"has {len(SECRET)}")
    assert SECRET not in " ".join(psutil.Process(driver.pid).cmdline())


def test_its_lines_are_forwarded_and_its_exit_code_is_told(start: Callable[[str], Driver], log: Log) -> None:
    driver = start("import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)")
    assert driver.wait(30) == 3
    assert log.lines == ["one", "two"]
    assert driver.last_line == "two"


def test_bytes_that_are_no_text_do_not_end_the_log(start: Callable[[str], Driver], log: Log) -> None:
    driver = start(r"import os; os.write(2, b'\xff\xfe broken\n'); os.write(2, b'after\n')")
    assert driver.wait(30) == 0
    assert log.lines[-1] == "after"


def test_it_has_a_session_of_its_own_and_not_the_tasks_standard_input(start: Callable[[str], Driver], log: Log) -> None:
    driver = start("import os, sys, time; print(repr(sys.stdin.read()), os.getsid(0)); time.sleep(600)")
    log.wait_for(lambda line: line == f"'' {driver.pid}")
    assert os.getsid(driver.pid) != os.getsid(0)
    assert driver.wait(0) is None


FAMILY = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, {handler})
sleep = "import signal, time; signal.signal(signal.SIGTERM, {child}); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", sleep])
print("child", child.pid)
time.sleep(600)
"""


def child_of(log: Log) -> psutil.Process:
    return psutil.Process(int(log.wait_for(lambda line: line.startswith("child ")).split()[1]))


def test_terminate_reaches_the_whole_group_and_waits_for_nothing(start: Callable[[str], Driver], log: Log) -> None:
    driver = start(FAMILY.format(handler="signal.SIG_DFL", child="signal.SIG_DFL"))
    child = child_of(log)
    driver.terminate()
    assert driver.wait(30) == -signal.SIGTERM
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running()


@pytest.mark.parametrize(
    ("handler", "ended_by"), [("signal.SIG_IGN", signal.SIGKILL), ("signal.SIG_DFL", signal.SIGTERM)]
)
def test_kill_ends_a_driver_that_does_not_listen_and_what_one_leaves_behind(
    start: Callable[[str], Driver], log: Log, handler: str, ended_by: int
) -> None:
    driver = start(FAMILY.format(handler=handler, child="signal.SIG_IGN"))
    child = child_of(log)
    driver.kill()
    assert driver.wait(0) == -ended_by
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running()


def test_one_that_was_asked_to_end_is_not_asked_again(start: Callable[[str], Driver], log: Log) -> None:
    """A second SIGTERM would end it before it has said in its operation why it leaves."""
    driver = start(
        "import signal, sys, time\n"
        "def leave(*_):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "    print('asked', flush=True)\n"
        "    time.sleep(0.3)\n"
        "    sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print('up', flush=True)\n"
        "signal.pause()\n"
    )
    log.wait_for(lambda line: line == "up")
    driver.terminate()
    log.wait_for(lambda line: line == "asked")
    driver.kill(30)
    assert driver.wait(0) == 3


def test_to_kill_one_that_has_ended_does_nothing(
    start: Callable[[str], Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = start("pass")
    assert driver.wait(30) == 0
    # Another process may have its number by now.
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("a reaped process was signalled"))
    driver.terminate()
    driver.kill()


def test_nobody_who_reads_holds_no_driver_up() -> None:
    """`roir build … 2>&1 | head`: the order's end was never heard, and the command waited for good."""

    def closed(_line: str) -> None:
        raise BrokenPipeError

    code = (
        f"for i in range(20000): print('a line of a driver', i)\nprint('roir: {ENDED}7')\nimport sys; sys.stdin.read()"
    )
    driver = Driver(python(code), driver_environment(SECRET), closed, takes_orders=True)
    try:
        assert driver.wait_for_order(30.0) == 7
        driver.release()
        assert driver.wait(30.0) == 0
    finally:
        driver.kill()


# A driver with a guard, and a child that is deaf to SIGTERM, in a group of its own.
LEAVES = """
import os, signal, subprocess, sys, time
from airflow_roir.spark import guard
guard.begin()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], preexec_fn=os.setpgrp)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("asks", ["wait", "wait_for_order"])
def test_a_driver_that_dies_leaves_nobody_behind_even_without_its_guard(log: Log, asks: str) -> None:
    """Found: a driver that was killed after its guard had been killed (the OOM killer takes what it finds) left its JVM
    and workers. It holds: the command, or the task, kills what is left of the driver's session before it reaps the
    driver.
    """
    driver = Driver(python(LEAVES), driver_environment(SECRET), log)
    log.wait_for(str.isdigit)
    left = psutil.Process(driver.pid).children(recursive=True)
    assert len(left) == 2
    (guard,) = [one for one in left if any(part.endswith("guard.py") for part in one.cmdline())]
    guard.kill()
    os.kill(driver.pid, signal.SIGKILL)
    with suppress(SparkFailed):
        getattr(driver, asks)(30)
    _, alive = psutil.wait_procs(left, timeout=30)
    for one in alive:
        one.kill()
    assert not alive
