"""`imagefleet broker`: short-lived SAS tokens for the nodes of SaladCloud."""
