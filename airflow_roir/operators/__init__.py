"""The tasks of an index build. Each reads its context, calls the engine and returns the operation's id."""
