"""The course: starters with stubs, checks, diffs and snapshots, all generated from the sources of the book.

``python -m minisgl.course list`` tells what there is. Nothing here is copied by hand: a task is a function of the
package whose body is taken away, and what belongs to a chapter is read off the imports.
"""
