"""Where samples come from: manifests, images, ratings, and the mini benchmark."""
