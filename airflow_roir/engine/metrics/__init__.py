"""What monitoring is sent and asks for."""
