"""The forecast of an operation before it begins: room, time, locks, rights, statements. Changes nothing."""
