"""What ran when: numbers, text, pictures and traces. Imports no torch."""
