"""`imagefleet gate`: whether two ways of drawing the same jobs make the same images."""
