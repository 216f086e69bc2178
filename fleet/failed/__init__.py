"""`imagefleet failed`: lists, exports, replays and discards failed jobs."""
