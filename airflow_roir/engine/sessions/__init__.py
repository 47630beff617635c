"""Sessions: the settings that each begins with, how long it waits, and which server it is on."""
