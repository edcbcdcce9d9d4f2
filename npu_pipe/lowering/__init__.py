"""Schedule -> Program: transfers placed so that nothing hangs. Imports no torch."""
