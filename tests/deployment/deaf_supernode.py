"""Start fl-bn's SuperNode, but without its error replies for processes that died, as Flower's SuperNode behaves.

Tests use it as a negative control.
"""

from fl_bn_site import supernode

supernode.answer_for_the_dead = lambda state, servicer: None
supernode.main()
