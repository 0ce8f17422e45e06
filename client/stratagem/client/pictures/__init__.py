"""Pictures of what trains, as SVG text with a table of the same numbers.

Values in, text out: no clock, nothing random, fixed decimals, so equal values make equal pictures.
No script and no `style` attribute, so that they are shown under a strict content policy. Colours
are attributes, which a file shows by itself, and classes, through which a page gives them others.
"""
