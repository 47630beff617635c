-- What heap and index of a table disagree about, so that lookups can't explain it: a kind of its own, with what was seen.
ALTER TABLE roir.discrepancy DROP CONSTRAINT discrepancy_kind;
ALTER TABLE roir.discrepancy ADD CONSTRAINT discrepancy_kind
    CHECK (kind IN ('missing', 'extra', 'different', 'corrupt', 'damaged'));
ALTER TABLE roir.discrepancy ADD COLUMN detail text;

ALTER TABLE roir.verification ADD COLUMN damaged bigint NOT NULL DEFAULT '0';

-- reach: what a segment's B-tree leads to, counted beside its heap. whole, both: all of either side, in one statement.
ALTER TABLE roir.verification_unit DROP CONSTRAINT verification_unit_stage;
ALTER TABLE roir.verification_unit ADD CONSTRAINT verification_unit_stage
    CHECK (stage IN ('total', 'sum', 'check', 'whole'));
ALTER TABLE roir.verification_unit DROP CONSTRAINT verification_unit_side;
ALTER TABLE roir.verification_unit ADD CONSTRAINT verification_unit_side
    CHECK (side IN ('source', 'heap', 'entry', 'delta', 'tree', 'reach', 'both'));
