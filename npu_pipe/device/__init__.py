"""What names a kind of device: one file a kind, behind one protocol."""
