"""What an operation will take, told before it begins: room, time, locks, rights, statements. Changes nothing."""
