"""Media: images and sounds of rows, from untrusted bytes to what a processor makes of them."""
