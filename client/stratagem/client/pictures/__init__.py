"""Draw training as SVG text with a table of the same numbers, without scripts or `style`
attributes, so a strict content policy permits the pictures. Output depends on the given values
only: there is no clock and no randomness, and decimals are fixed, so equal values make equal
pictures.
"""
