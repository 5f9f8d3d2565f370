"""The equivalence: which prior a penalty stands for, and the other way round."""
