"""What an error means, how long is waited for it to pass, and how the operation's row says so."""
