"""The runtime: from messages and images to text, on the engines of a bundle."""
