"""Writers announce entries before they commit, so that strict readers miss none."""
