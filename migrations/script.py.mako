"""${message}"""

from __future__ import annotations

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    ${upgrades if upgrades else "raise SystemExit('write the migration')"}


def downgrade() -> None:
    ${downgrades if downgrades else "raise SystemExit('write the migration')"}
