"""The user's callbacks: which hooks an object of theirs has, and the calls of them."""
