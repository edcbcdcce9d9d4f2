"""An emulator of what lies under torch_npu; see README.md."""
