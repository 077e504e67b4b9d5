"""Our SuperNode without the answers for processes that died: Flower's own behaviour, as a negative control."""

from fl_bn_site import supernode

supernode.answer_for_the_dead = lambda state, servicer: None
supernode.main()
