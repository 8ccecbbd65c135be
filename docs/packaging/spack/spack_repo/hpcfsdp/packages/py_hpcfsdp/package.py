"""A Spack package. It builds from a clone: ``spack dev-build py-hpcfsdp@0.1.0`` in the repository's folder."""

from spack.package import depends_on, license, variant, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHpcfsdp(PythonPackage):
    """Fully sharded data parallel training launched by MPI, with checkpoints in one HDF5 file."""

    license("BSD-3-Clause")

    version("0.1.0")

    variant("mpio", default=False, description='An h5py with MPI, for checkpoints with writer="mpio"')
    variant("plot", default=False, description="matplotlib, for `hpcfsdp plot`")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools", type="build")
    depends_on("py-torch@2.11:+distributed", type=("build", "run"))
    depends_on("py-mpi4py@4.0:", type=("build", "run"))
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-h5py@3.11:", type=("build", "run"))
    depends_on("py-h5py+mpi", type=("build", "run"), when="+mpio")
    depends_on("py-jinja2@3.1:", type=("build", "run"))
    depends_on("py-jsonargparse@4.40:+signatures", type=("build", "run"))
    depends_on("py-psutil@5.9:", type=("build", "run"))
    depends_on("py-pyyaml@6.0:", type=("build", "run"))
    depends_on("py-rich@13.0:", type=("build", "run"))
    depends_on("py-xxhash@3.4:", type=("build", "run"))
    depends_on("py-matplotlib@3.8:", type=("build", "run"), when="+plot")
