"""Read text for BERT: lines of token ids or raw files, as masked sentence pairs."""
