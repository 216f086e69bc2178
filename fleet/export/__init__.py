"""`imagefleet export`: a campaign's images as shards of a data set."""
