"""Images: from a list in a folder or a .tar, or in memory."""
