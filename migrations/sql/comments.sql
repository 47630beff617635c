-- Describes the tables and columns of the control schema: `\d+` shows it, and docs/reference/control-schema.md is made
-- of it. Not described: ids, references, and the claim_… columns, which are alike in every table of claimed pieces.

COMMENT ON TABLE roir.home IS
    'One row: where this control schema is at home. Other oids show a restored dump or a pg_upgrade.';
COMMENT ON COLUMN roir.home.tables IS 'the oids of some tables of this schema';
COMMENT ON COLUMN roir.home.schema_oid IS 'the oid of the schema itself';
COMMENT ON COLUMN roir.home.made_by IS
    'a checksum of the SQL that made this schema: code with other SQL of the same version refuses it';

COMMENT ON TABLE roir.index IS
    'A definition of an index. A dropped index keeps its row for the history; its name is free again.';
COMMENT ON COLUMN roir.index.schema_name IS 'the schema of the view that shows the index';
COMMENT ON COLUMN roir.index.name IS 'the name of that view';
COMMENT ON COLUMN roir.index.source_oid IS
    'the source table; of an index over shards its shape table, an empty table with the same columns';
COMMENT ON COLUMN roir.index.key_columns IS 'names, in order';
COMMENT ON COLUMN roir.index.expressions IS
    'pairs of the name of a key or included column, and the SQL of its expression, as of the function i<id>_<number>';
COMMENT ON COLUMN roir.index.condition IS 'of a partial index: only rows that satisfy it have entries; else empty';
COMMENT ON COLUMN roir.index.included_columns IS 'names, in order';
COMMENT ON COLUMN roir.index.is_unique IS 'no two rows may have the same key';
COMMENT ON COLUMN roir.index.nulls_not_distinct IS 'two NULLs of a unique key are the same';
COMMENT ON COLUMN roir.index.dropped_at IS 'when the index was dropped';
COMMENT ON COLUMN roir.index.shard_table IS 'of an index over shards: the table in each shard';
COMMENT ON COLUMN roir.index.shard_column IS 'of an index over shards: the column that names the shard';
COMMENT ON COLUMN roir.index.announced_by IS
    'who announces writes before they commit: the shard''s server or its clients; null: neither, so strict reads are '
    'refused';
COMMENT ON COLUMN roir.index.rows_view IS
    'the columns of the table as the view of whole rows has them; null: there is no such view';

COMMENT ON TABLE roir.shard IS 'A server that has tables of indexes over shards.';
COMMENT ON COLUMN roir.shard.name IS 'as users call it';
COMMENT ON COLUMN roir.shard.dsn IS
    'how workers and feeds reach it. From an Airflow connection: as a task resolved it last. No row names a '
    'connection, since a role that may write here could then name any';
COMMENT ON COLUMN roir.shard.index_dsn IS 'how the shard''s server reaches the index server, to announce writes';
COMMENT ON COLUMN roir.shard.home IS
    'the token of the database that was added: another database that answers under this DSN is refused';
COMMENT ON COLUMN roir.shard.added_at IS 'when it was added';
COMMENT ON COLUMN roir.shard.removed_at IS 'when it was removed';
COMMENT ON COLUMN roir.shard.away_until IS 'until when no run tries to reach it';
COMMENT ON COLUMN roir.shard.problem IS 'why it was not reached';
COMMENT ON COLUMN roir.shard.problem_at IS 'since when';

COMMENT ON TABLE roir.feed IS 'The feed from one shard to one generation.';
COMMENT ON COLUMN roir.feed.outbox IS 'the table in the shard that the capture writes to';
COMMENT ON COLUMN roir.feed.source_oid IS 'the shard''s table';
COMMENT ON COLUMN roir.feed.captured_at IS 'when the capture was committed there, with its writers drained';
COMMENT ON COLUMN roir.feed.removed_at IS 'when all of the capture was removed';
COMMENT ON COLUMN roir.feed.owner IS 'who ships; null: no process';
COMMENT ON COLUMN roir.feed.token IS 'fencing token: what is shipped under another token changes nothing (I4)';
COMMENT ON COLUMN roir.feed.heartbeat_at IS 'last sign of life of the owner';
COMMENT ON COLUMN roir.feed.step IS
    'counts what was applied here; the shard keeps the step up to which it has cleared rows away';
COMMENT ON COLUMN roir.feed.tick IS
    'counts polls in the shard, as far as they were applied here; a shard that counts less has lost commits';
COMMENT ON COLUMN roir.feed.emptied IS 'the version of the shard''s last TRUNCATE that was applied';
COMMENT ON COLUMN roir.feed.fresh_at IS
    'all that was committed in the shard before this moment, by the clock of this server, is in the generation';
COMMENT ON COLUMN roir.feed.announced_by IS
    'who announces there; written before the trigger is made, taken back after it is gone';
COMMENT ON COLUMN roir.feed.strict_from IS 'since when each writer there announces; strict reads need a later fresh_at';
COMMENT ON COLUMN roir.feed.strict_history IS
    'the history of this server that strict_from holds in; another one may have lost what was announced';
COMMENT ON COLUMN roir.feed.strict_start IS
    'the start of this server since which polls have found that it lost nothing of the shard''s';
COMMENT ON COLUMN roir.feed.evidence IS
    'shows that the capture there is what it was, and how values are compared there (roir_shard.evidence)';
COMMENT ON COLUMN roir.feed.pending IS 'rows in the outbox, as the last poll found it';
COMMENT ON COLUMN roir.feed.pending_bytes IS 'size of the outbox, as the last poll found it';
COMMENT ON COLUMN roir.feed.oldest_at IS 'since when its oldest row waits';
COMMENT ON COLUMN roir.feed.shipped IS 'entries that were applied';
COMMENT ON COLUMN roir.feed.doubtful_at IS
    'since when entries of the shard may be wrong; only a verification that repairs ends it';
COMMENT ON COLUMN roir.feed.doubt IS 'why';

COMMENT ON TABLE roir.generation IS
    'One physical build of an index. Partial unique indexes allow one building and one active generation of an index.';
COMMENT ON COLUMN roir.generation.status IS
    'building; active: readers see it; retired: maintained until its revert window ends; dropped';
COMMENT ON COLUMN roir.generation.capture_mode IS
    'capture: a write goes to the delta; direct: to the base, and the delta shrinks; active: there is no delta; none: '
    'dropped';
COMMENT ON COLUMN roir.generation.mode_xid IS
    'the transaction that rendered this mode: an older snapshot may not see every entry';
COMMENT ON COLUMN roir.generation.layout IS
    'counts the swaps of its segments: to an older snapshot the new ones are empty (docs/architecture.md#compaction)';
COMMENT ON COLUMN roir.generation.laid_out_at IS 'when the last swap committed';
COMMENT ON COLUMN roir.generation.entry IS
    'its columns: names, types, collations and their versions, equality operators, covered or not';
COMMENT ON COLUMN roir.generation.published_at IS 'when readers saw it first';
COMMENT ON COLUMN roir.generation.retired_at IS 'when another generation took its place';
COMMENT ON COLUMN roir.generation.drop_after IS 'end of the revert window';
COMMENT ON COLUMN roir.generation.ghosts IS 'antimatter that found no entry in the base';
COMMENT ON COLUMN roir.generation.scan IS 'what it is built from, and in which order (docs/architecture.md#scan)';
COMMENT ON COLUMN roir.generation.shape IS
    'what its entries depend on in the definition of the source (roir.source_shape), as it was at prepare';
COMMENT ON COLUMN roir.generation.looked_xid IS
    'of a unique index: duplicates were looked for in all that transactions before this one wrote to the delta';
COMMENT ON COLUMN roir.generation.unique_mode IS
    'of an index that is unique over shards: holders do nothing, count, or refuse';
COMMENT ON COLUMN roir.generation.unique_from IS 'since when they refuse';
COMMENT ON COLUMN roir.generation.unique_history IS 'the history of this server in which they refuse';
COMMENT ON COLUMN roir.generation.unique_lost IS 'why they no longer refuse';

COMMENT ON TABLE roir.emptied IS
    'The source or a leaf was truncated while a generation scans by blocks. Written by users'' statements, so no row '
    'here is updated, and no foreign key locks a row that a build needs.';
COMMENT ON COLUMN roir.emptied.generation_id IS '0: rows came into the bounds of a table that is being attached';
COMMENT ON COLUMN roir.emptied.relation IS 'the table, by oid';

COMMENT ON TABLE roir.lock_wait IS
    'Which command waits for a lock, and for whom, while no operation''s notice says so. A row whose process was '
    'killed counts for nothing after half a minute.';
COMMENT ON COLUMN roir.lock_wait.command IS 'the command that waits';
COMMENT ON COLUMN roir.lock_wait.index_name IS
    'as users name it, since a create has no row in roir.index yet; null: no single index';
COMMENT ON COLUMN roir.lock_wait.wanted IS 'the lock and the table';
COMMENT ON COLUMN roir.lock_wait.blocked_by IS 'the sessions and prepared transactions that hold it';
COMMENT ON COLUMN roir.lock_wait.waiter IS 'the process that waits';
COMMENT ON COLUMN roir.lock_wait.since IS 'when the first attempt failed';
COMMENT ON COLUMN roir.lock_wait.seen_at IS 'when the last attempt failed';

COMMENT ON TABLE roir.segment IS 'A partition of a base, by a range of keys.';
COMMENT ON COLUMN roir.segment.ordinal IS
    'in the order in which it was made; 0 is the default segment, which has the NULL keys';
COMMENT ON COLUMN roir.segment.lower IS 'partition bound as texts; null: unbounded';
COMMENT ON COLUMN roir.segment.upper IS 'likewise; both null: the default segment';
COMMENT ON COLUMN roir.segment.status IS
    'loading: without its unique index; indexed: the index is built and attached; sealed: vacuumed and analysed too';
COMMENT ON COLUMN roir.segment.refused_epoch IS 'the run that found duplicates in it: only a later run tries again';
COMMENT ON COLUMN roir.segment.sealed_at IS 'when it was sealed: about the age of its B-tree';

COMMENT ON TABLE roir.early_hashes IS
    'Hashes of a segment''s keys, part by part, while the segment is built (docs/architecture.md#early).';
COMMENT ON COLUMN roir.early_hashes.segment IS 'its ordinal';
COMMENT ON COLUMN roir.early_hashes.number IS
    'of the parts of a segment, in the order in which they were read; two readers cannot have the same';
COMMENT ON COLUMN roir.early_hashes.filenode IS 'the file that was read; another file makes all parts worthless';
COMMENT ON COLUMN roir.early_hashes.end_block IS 'all rows before it that the snapshot sees are in these parts';
COMMENT ON COLUMN roir.early_hashes.settled_block IS 'all rows before it are in these parts';
COMMENT ON COLUMN roir.early_hashes.snapshot IS 'the snapshot of the read';
COMMENT ON COLUMN roir.early_hashes.rows IS 'rows in this part';
COMMENT ON COLUMN roir.early_hashes.looked IS 'the duplicates that this part showed are written down';
COMMENT ON COLUMN roir.early_hashes.hashes IS 'eight bytes each, as the server sends an int8';

COMMENT ON TABLE roir.operation IS
    'One create, rebuild, verification or compaction. A partial unique index allows one unfinished operation of an '
    'index.';
COMMENT ON COLUMN roir.operation.kind IS 'create, rebuild, verify or compact';
COMMENT ON COLUMN roir.operation.status IS 'see Transitions';
COMMENT ON COLUMN roir.operation.phase IS 'see Transitions';
COMMENT ON COLUMN roir.operation.epoch IS
    'fencing: starting a run raises it, and no worker of an older run commits after that '
    '(docs/architecture.md#fencing)';
COMMENT ON COLUMN roir.operation.options IS
    'the options that stay as they were given; those that may change are columns';
COMMENT ON COLUMN roir.operation.rows_estimate IS 'rows of the source, as the plan estimated them';
COMMENT ON COLUMN roir.operation.fingerprint IS
    'of what the build depends on in the catalog (docs/architecture.md#fingerprint)';
COMMENT ON COLUMN roir.operation.format_version IS
    'of watermarks and bounds; code of another version refuses to continue';
COMMENT ON COLUMN roir.operation.owner IS 'the run that drives it';
COMMENT ON COLUMN roir.operation.heartbeat_at IS 'last sign of life of that run; null: no run drives it';
COMMENT ON COLUMN roir.operation.phase_seconds IS
    'committed seconds of work by phase, without pauses and without the start of Spark';
COMMENT ON COLUMN roir.operation.ticked_at IS 'until when they are counted';
COMMENT ON COLUMN roir.operation.created_by IS 'role that began it';
COMMENT ON COLUMN roir.operation.started_at IS 'when prepare committed';
COMMENT ON COLUMN roir.operation.paused_at IS 'since when it is paused';
COMMENT ON COLUMN roir.operation.pause_reason IS 'why';
COMMENT ON COLUMN roir.operation.paused_by IS 'a role, or what paused it: duplicates, window, max_duration, governor';
COMMENT ON COLUMN roir.operation.finished_at IS 'when it completed or was aborted';
COMMENT ON COLUMN roir.operation.error IS 'why it failed';
COMMENT ON COLUMN roir.operation.notice IS
    'whom the run waits for, or the last option that was refused, until one is accepted';
COMMENT ON COLUMN roir.operation.worth IS 'whether the index of a first build will pay, as its prepare has found';
COMMENT ON COLUMN roir.operation.spark_ui IS 'where the driver shows its jobs, while it runs';
COMMENT ON COLUMN roir.operation.without_spark IS
    'threads of a command drive it, or did last; roir resume uses them, too';
COMMENT ON COLUMN roir.operation.granted IS
    'how many workers the governor lets work; 0: all hold; null: no governor limits them';
COMMENT ON COLUMN roir.operation.granted_at IS 'when; an old grant is a hold';
COMMENT ON COLUMN roir.operation.throttled IS 'why fewer work than could';
COMMENT ON COLUMN roir.operation.throttled_since IS 'since when';
COMMENT ON COLUMN roir.operation.working_since IS 'begin of the present stretch of work, for max_duration_s';
COMMENT ON COLUMN roir.operation.queued_at IS 'since when it waits for other operations';
COMMENT ON COLUMN roir.operation.queued_seen_at IS 'when it last asked for its turn; after two minutes others pass it';
COMMENT ON COLUMN roir.operation.awaited_by IS 'the run that has promised to drive it, or to look again';
COMMENT ON COLUMN roir.operation.awaited_until IS
    'how long that promise holds, or when a run left it; infinity: that run waits for its turn until it ends';
COMMENT ON COLUMN roir.operation.grace_s IS 'seconds of silence after which its run is taken to be gone for good';
COMMENT ON COLUMN roir.operation.run_ended_at IS
    'when it was found that its runs have ended; null: they haven''t, as far as is known';
COMMENT ON COLUMN roir.operation.last_try IS 'whether the task that drives it has no other try';
COMMENT ON COLUMN roir.operation.scan_of IS 'the operation whose ranges these are a copy of: one scan serves both';
COMMENT ON COLUMN roir.operation.parallelism IS 'workers';
COMMENT ON COLUMN roir.operation.batch_rows IS 'most rows of a batch';
COMMENT ON COLUMN roir.operation.max_rows_per_second IS 'rate limit of all workers together; null: none';
COMMENT ON COLUMN roir.operation.shard_parallelism IS 'workers that read from one shard; null: no limit';
COMMENT ON COLUMN roir.operation.throttle IS 'limits of the governor, by signal';
COMMENT ON COLUMN roir.operation.windows IS 'hours in which it may work; null: always';
COMMENT ON COLUMN roir.operation.max_duration_s IS 'longest stretch of work, after which it pauses; null: none';
COMMENT ON COLUMN roir.operation.priority IS 'the greatest leaves the queue first';
COMMENT ON COLUMN roir.operation.warn_after_s IS 'the length of a pause after which roir warns of it; null: never';
COMMENT ON COLUMN roir.operation.abort_after_s IS 'the length of a pause after which it is aborted; null: never';

COMMENT ON TABLE roir.throttle_time IS 'Time that an operation has lost to its throttle, by cause.';
COMMENT ON COLUMN roir.throttle_time.cause IS 'a signal, or what the server lacked: disk, memory, connections';
COMMENT ON COLUMN roir.throttle_time.seconds IS 'of all workers together';
COMMENT ON COLUMN roir.throttle_time.last_at IS 'when time was last lost';

COMMENT ON TABLE roir.signal_sample IS 'readings and grants of the governor: at most 360 rows of an operation.';
COMMENT ON COLUMN roir.signal_sample.at IS 'when';
COMMENT ON COLUMN roir.signal_sample.granted IS 'workers';
COMMENT ON COLUMN roir.signal_sample.readings IS
    'by the names of the signals: value, limit, whose value it is, why there is none';

COMMENT ON TABLE roir.setting IS 'One row: what counts for all operations of the database.';
COMMENT ON COLUMN roir.setting.max_running_operations IS 'null: no limit';
COMMENT ON COLUMN roir.setting.guarded IS
    'false: the DDL guard was removed on purpose, and roir init does not install it again';

COMMENT ON TABLE roir.progress_sample IS
    'How far an operation was at a heartbeat: at most 240 rows of an operation, dense lately, thinner before.';
COMMENT ON COLUMN roir.progress_sample.at IS 'when';
COMMENT ON COLUMN roir.progress_sample.phase IS 'its phase';
COMMENT ON COLUMN roir.progress_sample.rows IS 'rows that its phases have done';
COMMENT ON COLUMN roir.progress_sample.percent IS 'of the whole operation';
COMMENT ON COLUMN roir.progress_sample.share IS 'of the rows, the part that is copied';
COMMENT ON COLUMN roir.progress_sample.worked IS 'seconds of work, without pauses';
COMMENT ON COLUMN roir.progress_sample.parallelism IS 'the option at that moment';
COMMENT ON COLUMN roir.progress_sample.slowed_by IS 'options that held workers back at that moment (roir.slowed_by)';

COMMENT ON TABLE roir.source_partition IS
    'A partition of the source, as a generation has it. A partition can come back while its old entries are still '
    'being removed.';
COMMENT ON COLUMN roir.source_partition.relation IS 'its oid';
COMMENT ON COLUMN roir.source_partition.parent IS 'oid of the table that it is, or was, a partition of';
COMMENT ON COLUMN roir.source_partition.leaf IS 'it has rows itself';
COMMENT ON COLUMN roir.source_partition.link IS
    'the transactions that made it and the levels above it partitions: other ones show that it was out meanwhile. If '
    'it is joining with bounds: what the copied entries rest on (roir.joins_as)';
COMMENT ON COLUMN roir.source_partition.name IS 'its name';
COMMENT ON COLUMN roir.source_partition.condition IS
    'its partition constraint, which tells its entries when the partition itself is gone';
COMMENT ON COLUMN roir.source_partition.bounds IS
    'of a joining one: as in ATTACH PARTITION, as the server writes them; null: a sync takes it in';
COMMENT ON COLUMN roir.source_partition.status IS
    'present: its rows have their entries; leaving: its rows are gone, their entries are hidden, then removed; '
    'joining: its rows are being brought in, and hidden until it is a partition';
COMMENT ON COLUMN roir.source_partition.watermark IS
    'of a joining one: the primary key of the last row that was brought in';
COMMENT ON COLUMN roir.source_partition.copied IS 'of a joining one: no row was left after the watermark';
COMMENT ON COLUMN roir.source_partition.removed_xid IS
    'of a leaving one: a transaction younger than all that removed an entry; entries stay hidden from older snapshots';
COMMENT ON COLUMN roir.source_partition.removed_at IS 'when the last entry was removed';

COMMENT ON TABLE roir.scan_range IS
    'A piece of one leaf of the source, of a shard''s table, or of a segment that a rebuild reads.';
COMMENT ON COLUMN roir.scan_range.ordinal IS 'in the order of the plan';
COMMENT ON COLUMN roir.scan_range.lower IS
    'half-open [lower, upper) in scan order: texts of a primary key, or a block number; null: unbounded';
COMMENT ON COLUMN roir.scan_range.upper IS 'likewise';
COMMENT ON COLUMN roir.scan_range.watermark IS
    'the place of the last row, or block, of the last committed batch: continue after it';
COMMENT ON COLUMN roir.scan_range.done IS 'all of it is copied';
COMMENT ON COLUMN roir.scan_range.rows IS 'rows copied';
COMMENT ON COLUMN roir.scan_range.batches IS 'batches committed';
COMMENT ON COLUMN roir.scan_range.seconds IS 'time of those batches';
COMMENT ON COLUMN roir.scan_range.relation IS 'the leaf, table or segment, by oid';
COMMENT ON COLUMN roir.scan_range.filenode IS 'the file whose blocks these are; another file ends the build';
COMMENT ON COLUMN roir.scan_range.shard_id IS 'the server of the relation; null: this server';
COMMENT ON COLUMN roir.scan_range.mark IS
    'of the last batch, as the shard has it; a shard without it has lost commits that were copied';
COMMENT ON COLUMN roir.scan_range.moved_at IS
    'last claim or batch: a worker that holds a range and does nothing holds up no other operation';

COMMENT ON TABLE roir.delta_part IS
    'Blocks of a delta that one worker folds. The next pass begins once all parts of the last one are done.';
COMMENT ON COLUMN roir.delta_part.pass IS 'number of the pass';
COMMENT ON COLUMN roir.delta_part.ordinal IS 'within the operation';
COMMENT ON COLUMN roir.delta_part.next_block IS 'blocks before it are folded';
COMMENT ON COLUMN roir.delta_part.end_block IS 'where the part ends';
COMMENT ON COLUMN roir.delta_part.done IS 'all of it is folded';
COMMENT ON COLUMN roir.delta_part.upserted IS 'entries written to the base';
COMMENT ON COLUMN roir.delta_part.annihilated IS 'entries removed from the base';
COMMENT ON COLUMN roir.delta_part.ghosts IS 'antimatter without an entry';
COMMENT ON COLUMN roir.delta_part.seconds IS 'time of its steps';

COMMENT ON TABLE roir.verification IS 'One comparison of a generation with its source, and its result.';
COMMENT ON COLUMN roir.verification.operation_id IS 'itself an operation, or the build that it is a part of';
COMMENT ON COLUMN roir.verification.mode IS 'only: a verification; before, after: of a build, beside its publish';
COMMENT ON COLUMN roir.verification.options IS 'as they were given';
COMMENT ON COLUMN roir.verification.buckets IS 'how many buckets of primary keys both sides are summed in';
COMMENT ON COLUMN roir.verification.suspicious IS 'the buckets whose sums differed; null: all, or not known yet';
COMMENT ON COLUMN roir.verification.snapshot IS 'what its workers share at the moment';
COMMENT ON COLUMN roir.verification.snapshot_at IS 'when it was taken';
COMMENT ON COLUMN roir.verification.quota IS 'most units that it does; the next verification in slices does the rest';
COMMENT ON COLUMN roir.verification.rows IS 'source rows that were compared';
COMMENT ON COLUMN roir.verification.entries IS 'entries that were compared';
COMMENT ON COLUMN roir.verification.missing IS 'rows without their entry';
COMMENT ON COLUMN roir.verification.extra IS 'entries without their row';
COMMENT ON COLUMN roir.verification.different IS 'entries that differ from their row';
COMMENT ON COLUMN roir.verification.corrupt IS 'B-trees that amcheck or a lookup refused';
COMMENT ON COLUMN roir.verification.repaired IS 'differences that were repaired, or were right when looked at again';
COMMENT ON COLUMN roir.verification.complete IS
    'false: a sample, a slice or a time limit left something out; null: it has not ended';
COMMENT ON COLUMN roir.verification.started_at IS 'when it began';
COMMENT ON COLUMN roir.verification.finished_at IS 'when it ended';
COMMENT ON COLUMN roir.verification.damaged IS 'what heap and index of a table disagree about';
COMMENT ON COLUMN roir.verification.duplicate IS 'rows without an entry, since another row has their key';

COMMENT ON TABLE roir.verification_unit IS
    'the piece that one worker compares in one transaction. Deleted when the verification ends.';
COMMENT ON COLUMN roir.verification_unit.ordinal IS 'within its stage';
COMMENT ON COLUMN roir.verification_unit.stage IS
    'total: sums of everything; sum: sums by bucket; check: row by row; whole: both sides in one statement';
COMMENT ON COLUMN roir.verification_unit.side IS
    'source, by primary key; heap: the source by blocks; entry and delta; tree: a B-tree beside its heap; reach: what '
    'a segment''s B-tree leads to; both';
COMMENT ON COLUMN roir.verification_unit.relation IS 'a leaf of the source, a segment, or the delta, by oid';
COMMENT ON COLUMN roir.verification_unit.lower IS 'half-open [lower, upper), a primary key or a block; null: unbounded';
COMMENT ON COLUMN roir.verification_unit.upper IS 'likewise';
COMMENT ON COLUMN roir.verification_unit.done IS 'it is compared';
COMMENT ON COLUMN roir.verification_unit.rows IS 'rows or entries read';
COMMENT ON COLUMN roir.verification_unit.seconds IS 'time that it took';
COMMENT ON COLUMN roir.verification_unit.snapshot IS 'the snapshot that it was read in';
COMMENT ON COLUMN roir.verification_unit.buckets IS 'in stage sum: the buckets of primary keys whose sums these are';
COMMENT ON COLUMN roir.verification_unit.counts IS 'rows of each';
COMMENT ON COLUMN roir.verification_unit.sums IS 'sums of hashes of each';
COMMENT ON COLUMN roir.verification_unit.feed_id IS
    'of an index over shards: the feed whose entries it compares; null: entries of no feed';

COMMENT ON TABLE roir.compaction_unit IS
    'Neighbouring segments that other ones replace in one transaction (docs/architecture.md#compaction).';
COMMENT ON COLUMN roir.compaction_unit.ordinal IS 'in the order of the work: best gain for its cost first';
COMMENT ON COLUMN roir.compaction_unit.action IS 'rewrite: one by one; split: one by several; merge: several by one';
COMMENT ON COLUMN roir.compaction_unit.segments IS 'ordinals of those that go, in key order';
COMMENT ON COLUMN roir.compaction_unit.parts IS
    'ordinals of those that come, in key order; the default segment keeps its own';
COMMENT ON COLUMN roir.compaction_unit.cuts IS 'bounds between the parts, as texts; null until they are made';
COMMENT ON COLUMN roir.compaction_unit.files IS 'of each segment its oid, its file, and its blocks at the capture';
COMMENT ON COLUMN roir.compaction_unit.status IS
    'waiting, copying, indexing, folding; done: swapped in; left: not worth it, or not possible';
COMMENT ON COLUMN roir.compaction_unit.watermark IS 'the segment, by its place in files, and the next block';
COMMENT ON COLUMN roir.compaction_unit.blocks IS 'to copy';
COMMENT ON COLUMN roir.compaction_unit.blocks_done IS 'copied';
COMMENT ON COLUMN roir.compaction_unit.rows IS 'copied';
COMMENT ON COLUMN roir.compaction_unit.restarts IS 'how often it began again, since a segment was emptied or rewritten';
COMMENT ON COLUMN roir.compaction_unit.bytes_before IS 'size of the old segments';
COMMENT ON COLUMN roir.compaction_unit.bytes_after IS 'size of the new segments';
COMMENT ON COLUMN roir.compaction_unit.bytes_expected IS 'size that the choice expected';
COMMENT ON COLUMN roir.compaction_unit.gain IS 'pages that it saves in 30 days, as the choice computed it';
COMMENT ON COLUMN roir.compaction_unit.why IS 'in words';
COMMENT ON COLUMN roir.compaction_unit.note IS 'why it began again, or was left';
COMMENT ON COLUMN roir.compaction_unit.seconds IS 'time that it took';

COMMENT ON TABLE roir.suspect IS
    'a row or an entry of a bucket whose sums differed, in a verification over shards. Deleted once looks have '
    'decided.';
COMMENT ON COLUMN roir.suspect.unit_id IS 'the unit that found it';
COMMENT ON COLUMN roir.suspect.feed_id IS
    'null: of a shard that the index does not have, or in another segment than its key''s';
COMMENT ON COLUMN roir.suspect.of_source IS 'true: a row of the shard; false: an entry';
COMMENT ON COLUMN roir.suspect.identity IS 'texts of key and primary key, as the index server has them';
COMMENT ON COLUMN roir.suspect.hash IS 'of the record';
COMMENT ON COLUMN roir.suspect.looks IS 'how often it was looked at and was still on its way';

COMMENT ON TABLE roir.discrepancy IS 'A difference that one snapshot showed.';
COMMENT ON COLUMN roir.discrepancy.unit_id IS 'the unit that found it; 0: a view that does not show what it must';
COMMENT ON COLUMN roir.discrepancy.kind IS
    'missing, extra, different; corrupt: a B-tree that amcheck or a lookup refused; damaged: heap and index of a '
    'table disagree; duplicate: another row has the key, and its entry is in entry_values';
COMMENT ON COLUMN roir.discrepancy.key IS 'texts, lossless';
COMMENT ON COLUMN roir.discrepancy.primary_key IS 'texts, lossless';
COMMENT ON COLUMN roir.discrepancy.source_values IS
    'texts in the order of the entry''s columns, of an included one the first 1,000 characters; null: no row';
COMMENT ON COLUMN roir.discrepancy.entry_values IS 'likewise; null: no entry';
COMMENT ON COLUMN roir.discrepancy.found_at IS 'when';
COMMENT ON COLUMN roir.discrepancy.outcome IS
    'gone: right when it was looked at again under a lock; null: as it was';
COMMENT ON COLUMN roir.discrepancy.repaired_at IS 'when it was repaired, or found right';
COMMENT ON COLUMN roir.discrepancy.detail IS 'of what is damaged, or a duplicate: what was seen, where, and the remedy';

COMMENT ON TABLE roir.duplicate IS
    'A row that shares its key with another row, in a unique index: one snapshot showed both.';
COMMENT ON COLUMN roir.duplicate.shared_key IS 'texts: the key that names the group, since equal keys may differ';
COMMENT ON COLUMN roir.duplicate.key IS 'texts: the key as this row has it';
COMMENT ON COLUMN roir.duplicate.primary_key IS 'texts';
COMMENT ON COLUMN roir.duplicate.partition IS 'where the row is; null: not looked up yet, or gone';
COMMENT ON COLUMN roir.duplicate.phase IS 'the phase that found it; attach: a table that is being attached';
COMMENT ON COLUMN roir.duplicate.found_at IS 'when';
COMMENT ON COLUMN roir.duplicate.healed_at IS 'when its key was no longer shared';
COMMENT ON COLUMN roir.duplicate.key_hash IS 'of shared_key, which may be longer than an index takes';

COMMENT ON TABLE roir.event IS 'who did what, when and why';
COMMENT ON COLUMN roir.event.at IS 'several events of one transaction keep their order';
COMMENT ON COLUMN roir.event.actor IS 'the role';
COMMENT ON COLUMN roir.event.action IS 'what was done';
COMMENT ON COLUMN roir.event.detail IS 'why, or with what';

COMMENT ON TABLE roir.reference IS
    'A foreign key of a table, the child, to the key of a unique index. `roir reference --remove` deletes the row.';
COMMENT ON COLUMN roir.reference.name IS 'the constraint of the child';
COMMENT ON COLUMN roir.reference.key_columns IS 'the child''s columns that hold the index''s key, in its order';
COMMENT ON COLUMN roir.reference.added_columns IS
    'the child''s columns that hold the other columns of the parent''s primary key';
COMMENT ON COLUMN roir.reference.made_columns IS 'those of them that the child did not have before';
COMMENT ON COLUMN roir.reference.on_delete IS
    'what a delete of the parent''s row does: no-action, restrict, cascade, set-null, set-default';
COMMENT ON COLUMN roir.reference.on_update IS 'what a change of its key does: no-action, cascade';
COMMENT ON COLUMN roir.reference.deferred IS 'the check comes at the commit';
COMMENT ON COLUMN roir.reference.status IS
    'filling: new rows are checked, older ones are being filled; active: all rows are checked';
COMMENT ON COLUMN roir.reference.created_by IS 'who began it';
COMMENT ON COLUMN roir.reference.created_at IS 'when it began';
