"""What all pictures are drawn with: elements of SVG, colours, scales, frames and lanes."""
