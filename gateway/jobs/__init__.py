"""Jobs of the gateway's clients: sent together, awaited by one reader, withdrawn if need be."""
