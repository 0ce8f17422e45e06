"""Walks: which files a reader enters who follows one thing through the product."""
