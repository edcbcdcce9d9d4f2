"""The seam for operators that fuse a matrix product with the transfer of its operand or result."""
