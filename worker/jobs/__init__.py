"""Jobs in flight: their images, what of them is stored already, and whose turn it is."""
