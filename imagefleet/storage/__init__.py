"""Where jobs wait and where images go: two small protocols, implemented twice."""
