"""Who owns which GPU: the records, the steps that may follow each other, and the adoption of a store."""
