"""What an image file says of its origin to programs: IPTC's digital source type, in XMP.

https://cv.iptc.org/newscodes/digitalsourcetype/ has the terms, which laws such as Article 50(2) of
the European Union's AI Act are met with by search engines and picture agencies.
"""

from typing import Literal

from imagefleet.job.message import Job

#: Generated; generated from a picture that was given, or in a part of it; a picture enlarged.
Mark = Literal[
    "trainedAlgorithmicMedia",
    "compositeWithTrainedAlgorithmicMedia",
    "algorithmicallyEnhanced",
]

_XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/">'
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description rdf:about=""'
    ' xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/"'
    ' Iptc4xmpExt:DigitalSourceType="http://cv.iptc.org/newscodes/digitalsourcetype/{mark}"/>'
    "</rdf:RDF></x:xmpmeta>"
)


def mark_of(job: Job) -> Mark:
    """What a job's image is; a later stage's, by what its chain began with."""
    first = job.place.job if job.place else job
    if first.only_upscales:
        return "algorithmicallyEnhanced"
    if first.init_images:
        return "compositeWithTrainedAlgorithmicMedia"
    return "trainedAlgorithmicMedia"


def xmp(mark: Mark) -> str:
    """The packet that a file holds."""
    return _XMP.format(mark=mark)
