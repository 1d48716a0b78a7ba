"""The program that watches over one rank. It imports the standard library only, and runs without lightning_distrec."""
