"""What a release needs: the package, the images, the scripts, the examples, checks of a GPU."""
