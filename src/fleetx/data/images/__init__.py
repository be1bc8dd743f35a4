"""Read images: from a list in a folder or a .tar, or from memory."""
