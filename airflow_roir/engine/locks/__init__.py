"""Locks on users' relations: how the engine waits for them, gives way, and names their holders."""
