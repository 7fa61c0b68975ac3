"""Who a process is, and how it proves that: identities, the authority that certifies them, and their files."""
