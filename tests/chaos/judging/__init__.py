"""Campaigns that are judged, for tests of kills."""
