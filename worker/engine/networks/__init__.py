"""The networks that slots draw with: shared weights, and what each slot has of its own."""
