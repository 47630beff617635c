"""The capture in a shard: outbox, triggers, and the evidence that they existed all the while."""
