"""The capture in a shard: outbox, triggers, and what tells that they were there all the while."""
