"""What is particular to each model family; the export itself is common."""
