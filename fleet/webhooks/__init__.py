"""`imagefleet webhooks`: reports the ends of campaigns and jobs to a web address."""
