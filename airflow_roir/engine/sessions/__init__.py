"""What every session begins with, how long it waits, and which server it is on."""
