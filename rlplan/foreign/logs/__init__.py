"""What training stacks wrote about their steps: their metrics' names, and the files that hold them."""
