"""Imported by any Python that finds this folder: a library that counts its objects once the
interpreter has been taken apart, and takes what is left for a mistake."""

import ctypes

COUNTED = ctypes.CDLL(None).abort
ctypes.pythonapi.Py_AtExit(COUNTED)
