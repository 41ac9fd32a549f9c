"""Formats that have no reader, in the order in which they are tried."""

from __future__ import annotations

from matex_data.readers.unsupported import UnsupportedFormat

_ZIP = b"PK\x03\x04.{26}"  # header of the first member, in front of its name
_PANDAS = 'pandas.{read}("{{file}}").to_parquet("{{stem}}.parquet")'
_NIBABEL = 'numpy.save("{stem}.npy", nibabel.load("{file}").get_fdata(dtype="float32")), with the sample axis first'
_MICROSCOPE = 'bfconvert "{file}" "{stem}.ome.tiff" (Bio-Formats)'
_MDANALYSIS = (
    'numpy.save("{stem}.npy", [frame.positions for frame in MDAnalysis.Universe(topology, "{file}").trajectory])'
)

UNSUPPORTED = (
    # Tables
    UnsupportedFormat(
        "an Excel workbook (.xlsx)",
        _PANDAS.format(read="read_excel"),
        begin=_ZIP + rb"(?:xl/|docProps/|_rels/\.rels|\[Content_Types\]\.xml).{0,60000}xl/",
        suffixes=(".xlsx", ".xlsm", ".xlsb"),
    ),
    UnsupportedFormat(
        "an Excel workbook of the time before 2007 (.xls), or another OLE document",
        _PANDAS.format(read="read_excel"),
        magic=((0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"),),
        suffixes=(".xls",),
    ),
    UnsupportedFormat(
        "an OpenDocument spreadsheet",
        _PANDAS.format(read="read_excel"),
        begin=_ZIP + rb"mimetypeapplication/vnd\.oasis\.opendocument\.spreadsheet",
        suffixes=(".ods",),
    ),
    UnsupportedFormat(
        "an ORC table",
        'pyarrow.parquet.write_table(pyarrow.orc.read_table("{file}"), "{stem}.parquet")',
        begin=rb"ORC(?![ -~]{3})",
        suffixes=(".orc",),
    ),
    UnsupportedFormat(
        "a Feather file of version 1",
        'pyarrow.feather.write_feather(pandas.read_feather("{file}"), "{stem}.arrow")',
        magic=((0, b"FEA1"),),
    ),
    UnsupportedFormat(
        "an Avro file",
        'polars.read_avro("{file}").write_parquet("{stem}.parquet")',
        magic=((0, b"Obj\x01"),),
        suffixes=(".avro",),
    ),
    UnsupportedFormat(
        "a Stata table",
        _PANDAS.format(read="read_stata"),
        begin=rb"<stata_dta>|[\x69-\x73][\x01\x02]\x01\0",
        suffixes=(".dta",),
    ),
    UnsupportedFormat(
        "a SAS table",
        _PANDAS.format(read="read_sas"),
        magic=((12, b"\xc2\xea\x81\x60\xb3\x14\x11\xcf\xbd\x92\x08\x00"), (0, b"HEADER RECORD*******LIB")),
        suffixes=(".sas7bdat", ".xpt"),
    ),
    UnsupportedFormat(
        "an SPSS table",
        _PANDAS.format(read="read_spss"),
        magic=((0, b"$FL2@(#)"), (0, b"$FL3@(#)")),
        suffixes=(".sav", ".zsav", ".por"),
    ),
    UnsupportedFormat(
        "objects of R",
        'in R: arrow::write_parquet(readRDS("{file}"), "{stem}.parquet"); load() for .RData',
        decompresses=True,
        begin=rb"RD[ABX][23]\n|X\n\0\0\0[\x02\x03]|A\n[23]\n",
        suffixes=(".rds", ".rdata", ".rda"),
    ),
    UnsupportedFormat(
        "a dBASE table",
        'pandas.DataFrame(iter(dbfread.DBF("{file}"))).to_parquet("{stem}.parquet")',
        suffixes=(".dbf",),
    ),
    UnsupportedFormat(
        "an ESRI shapefile",
        'geopandas.read_file("{file}").to_parquet("{stem}.parquet")',
        begin=rb"\0\0\x27\x0a\0{20}",
        suffixes=(".shp",),
    ),
    UnsupportedFormat(
        "an SQLite database",
        'pandas.read_sql("SELECT * FROM ...", sqlite3.connect("{file}")).to_parquet("{stem}.parquet")',
        magic=((0, b"SQLite format 3\0"),),
        suffixes=(".sqlite", ".sqlite3", ".gpkg"),
    ),
    UnsupportedFormat(
        "an LMDB database",
        'the values of lmdb.open("{file}").begin().cursor() to HDF5 by h5py, decoded as their program encoded them',
        magic=((16, b"\xde\xc0\xef\xbe"),),
        suffixes=(".lmdb", ".mdb"),
        folder=("data.mdb",),
    ),
    UnsupportedFormat(
        "a Delta table",
        'deltalake.DeltaTable("{file}").to_pyarrow_table() to pyarrow.parquet.write_table(...)',
        folder=("_delta_log",),
    ),
    # Weather and climate
    UnsupportedFormat(
        "GRIB messages",
        'xarray.open_dataset("{file}", engine="cfgrib").to_netcdf("{stem}.nc"); cdo -f nc4 copy "{file}" "{stem}.nc"',
        begin=rb"GRIB.{3}[\x01\x02]",
        suffixes=(".grib", ".grib1", ".grib2", ".grb", ".grb2"),
    ),
    UnsupportedFormat(
        "BUFR messages",
        'pdbufr.read_bufr("{file}", columns=...).to_parquet("{stem}.parquet")',
        begin=rb"BUFR.{3}[\x02-\x05]",
        suffixes=(".bufr",),
    ),
    UnsupportedFormat(
        "an HDF4 file, such as of MODIS",
        'h4toh5convert "{file}" "{stem}.h5"',
        magic=((0, b"\x0e\x03\x13\x01"),),
        suffixes=(".hdf4", ".h4"),
    ),
    # Simulations
    UnsupportedFormat(
        "an ADIOS2 data set (.bp)",
        'openpmd-pipe --infile "{file}" --outfile "{stem}.h5" for openPMD; otherwise adios2.FileReader and h5py',
        magic=((0, b"ADIOS-BP"),),
        suffixes=(".bp", ".bp4", ".bp5"),
        folder=("md.idx", "md.0"),
    ),
    UnsupportedFormat(
        "a VTK file",
        'meshio convert "{file}" "{stem}.xdmf" (data in HDF5), or pyvista.read("{file}").point_data and h5py',
        begin=rb"# vtk DataFile|(?:<\?xml[^>]*>)?\s*<VTKFile",
        suffixes=(".vtk", ".vtu", ".vti", ".vtp", ".vts", ".vtr", ".pvtu"),
    ),
    UnsupportedFormat(
        "a trajectory of molecules (DCD, XTC or TRR)",
        _MDANALYSIS,
        begin=rb"\0\0\x07[\xc9\xcb]\0\0|T\0\0\0CORD|\0\0\0TCORD",
        suffixes=(".dcd", ".xtc", ".trr"),
    ),
    UnsupportedFormat(
        "a structure of the Protein Data Bank (PDB)",
        'numpy.save("{stem}.npy", MDAnalysis.Universe("{file}").atoms.positions)',
        begin=rb"HEADER    .{40}\d\d-[A-Z]{3}-\d\d   \w{4}"
        rb"|(?:(?:HEADER|OBSLTE|TITLE |COMPND|SOURCE|KEYWDS|EXPDTA|AUTHOR|REMARK|CRYST1|ORIGX[1-3]|SCALE[1-3]|MODEL )"
        rb"[^\n]*\n)*(?:ATOM  |HETATM)[ \d]{5} [^\n]{18}(?: {0,7}-?\d+\.\d{3}){3}",
        suffixes=(".pdb", ".ent"),
    ),
    UnsupportedFormat(
        "a crystallographic information file (CIF, mmCIF)",
        'ase.io.read("{file}").positions, or gemmi.cif.read("{file}"), to HDF5 by h5py',
        begin=rb"data_\S+\s*\n\s*(?:#|_\w+[.\w]|loop_)",
        suffixes=(".cif", ".mmcif"),
    ),
    # Medicine and biology
    UnsupportedFormat(
        "a DICOM file",
        'numpy.save("{stem}.npy", pydicom.dcmread("{file}").pixel_array), or dcm2niix for a series',
        magic=((128, b"DICM"),),
        suffixes=(".dcm", ".dicom"),
    ),
    UnsupportedFormat(
        "a NIfTI image",
        _NIBABEL,
        magic=((344, b"n+1\0"), (344, b"ni1\0"), (4, b"n+2\0\r\n\x1a\n"), (4, b"ni2\0\r\n\x1a\n")),
        decompresses=True,
        suffixes=(".nii", ".nii.gz"),
    ),
    UnsupportedFormat("an image of FreeSurfer", _NIBABEL, suffixes=(".mgh", ".mgz")),
    UnsupportedFormat(
        "an NRRD image",
        'numpy.save("{stem}.npy", nrrd.read("{file}")[0])',
        begin=rb"NRRD000[1-5]",
        suffixes=(".nrrd", ".nhdr"),
    ),
    UnsupportedFormat(
        "a recording in EDF or BDF",
        'numpy.save("{stem}.npy", mne.io.read_raw("{file}").get_data().T)',
        begin=rb"0 {7}[ -~]{160}\d\d\.\d\d\.\d\d\d\d\.\d\d\.\d\d|\xffBIOSEMI",
        suffixes=(".edf", ".bdf"),
    ),
    UnsupportedFormat(
        "an image of a Zeiss, Nikon or Leica microscope",
        _MICROSCOPE,
        begin=rb"ZISRAWFILE|\xda\xce\xbe\x0a\0\0\0|\x70\0\0\0.{4}\x2a",
        suffixes=(".czi", ".nd2", ".lif"),
    ),
    UnsupportedFormat(
        "a density map in MRC or CCP4 format",
        'numpy.save("{stem}.npy", mrcfile.open("{file}").data)',
        magic=((208, b"MAP "),),
        suffixes=(".mrc", ".mrcs", ".ccp4"),
    ),
    UnsupportedFormat(
        "sequences in FASTA or FASTQ",
        'pandas.DataFrame((r.id, str(r.seq)) for r in Bio.SeqIO.parse("{file}", "fasta")).to_parquet("{stem}.parquet")',
        begin=rb">[^\n]+\n[A-Za-z*-]{20,}\r?\n|@[^\n]+\n[ACGTN.]+\r?\n\+",
        suffixes=(".fasta", ".fa", ".fna", ".faa", ".fastq", ".fq", ".fasta.gz", ".fa.gz", ".fastq.gz", ".fq.gz"),
    ),
    UnsupportedFormat(
        "alignments in BAM or CRAM",
        'pysam.AlignmentFile("{file}"), row by row, to pandas.DataFrame(...).to_parquet("{stem}.parquet")',
        magic=((0, b"BAM\1"), (0, b"CRAM")),
        decompresses=True,
        suffixes=(".bam", ".cram"),
    ),
    UnsupportedFormat(
        "mass spectra in mzML",
        'pyteomics.mzml.read("{file}"), spectrum by spectrum, to ragged columns of Parquet',
        begin=rb"(?:<\?xml[^>]*>)?\s*<(?:indexed)?mzML",
        suffixes=(".mzml", ".mzml.gz"),
    ),
    # Instruments
    UnsupportedFormat(
        "a measurement file of ASAM (MDF)",
        'asammdf.MDF("{file}").to_dataframe().to_parquet("{stem}.parquet")',
        begin=rb"MDF     [1-9]\.",
        suffixes=(".mdf", ".mf4"),
    ),
    UnsupportedFormat(
        "a measurement file of LabVIEW (TDMS)",
        'nptdms.TdmsFile.read("{file}").as_dataframe().to_parquet("{stem}.parquet")',
        magic=((0, b"TDSm"),),
        suffixes=(".tdms",),
    ),
    UnsupportedFormat(
        "a point cloud in LAS or LAZ",
        'numpy.save("{stem}.npy", laspy.read("{file}").xyz)',
        magic=((0, b"LASF"),),
        suffixes=(".las", ".laz"),
    ),
    UnsupportedFormat(
        "a point cloud or mesh in PLY",
        'numpy.save("{stem}.npy", numpy.asarray(open3d.io.read_point_cloud("{file}").points))',
        begin=rb"ply\r?\nformat ",
        suffixes=(".ply",),
    ),
    UnsupportedFormat(
        "seismic traces in SEG-Y",
        'numpy.save("{stem}.npy", segyio.tools.collect(segyio.open("{file}", ignore_geometry=True).trace[:]))',
        magic=((0, b"\xc3\x40\xf1\x40"),),
        suffixes=(".sgy", ".segy"),
    ),
    UnsupportedFormat(
        "an LCIO file of particle events",
        'pylcio.IOIMPL.LCFactory.getInstance().createLCReader(), "{file}", event by event, to awkward.to_parquet(...)',
        magic=((4, b"\xab\xad\xca\xfe"),),
        suffixes=(".slcio",),
    ),
    # Pictures and sound
    UnsupportedFormat(
        "an OpenEXR image",
        'tifffile.imwrite("{stem}.tif", imageio.v3.imread("{file}", plugin="opencv"))',
        magic=((0, b"\x76\x2f\x31\x01"),),
        suffixes=(".exr",),
    ),
    UnsupportedFormat(
        "a video",
        'ffmpeg -i "{file}" "{stem}/%06d.png"',
        begin=rb".{4}ftyp(?:isom|mp4|iso|avc1|M4V|qt)|RIFF.{4}AVI |\x1a\x45\xdf\xa3",
        suffixes=(".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm"),
    ),
    UnsupportedFormat(
        "a recording of sound",
        'numpy.save("{stem}.npy", soundfile.read("{file}")[0])',
        begin=rb"RIFF.{4}WAVE|fLaC|OggS|ID3[\x02-\x04]",
        suffixes=(".wav", ".flac", ".ogg", ".mp3"),
    ),
    # Python, R and other programs
    UnsupportedFormat(
        "a pickle of Python, which runs code of whoever wrote it",
        'pandas.read_pickle("{file}").to_parquet("{stem}.parquet") for a table, numpy.save for an array; '
        "only of a file that you trust",
        begin=rb"\x80(?:[\x04\x05]\x95.{7}\0|[\x02\x03][}\](cX])",
        suffixes=(".pkl", ".pickle", ".joblib"),
    ),
    UnsupportedFormat(
        "weights or tensors of PyTorch",
        'numpy.save("{stem}.npy", torch.load("{file}", weights_only=True).numpy())',
        begin=_ZIP + rb"[^/\0]{1,200}/(?:data\.pkl|\.format_version)",
        suffixes=(".pt", ".pth"),
    ),
    UnsupportedFormat(
        "weights in safetensors",
        'numpy.savez("{stem}.npz", **safetensors.numpy.load_file("{file}"))',
        begin=rb'.{5}\0{3}\{"',
        suffixes=(".safetensors",),
    ),
    UnsupportedFormat(
        "a model of Keras, no data set",
        'keras.models.load_model("{file}")',
        begin=_ZIP + rb"(?:metadata|config)\.json",
        suffixes=(".keras",),
    ),
    UnsupportedFormat(
        "objects in MessagePack",
        'pandas.DataFrame(list(msgpack.Unpacker(open("{file}", "rb")))).to_parquet("{stem}.parquet")',
        suffixes=(".msgpack", ".mpack"),
    ),
    # Archives, and files that stand for others
    UnsupportedFormat(
        "an archive of NumPy arrays under another name",
        'open_dataset("{file}", format="npz"), or the suffix .npz',
        begin=_ZIP + rb"[^\0]{1,200}?\.npy",
    ),
    UnsupportedFormat(
        "a zip archive",
        'unzip "{file}", and open the files in it',
        magic=((0, b"PK\x03\x04"), (0, b"PK\x05\x06")),
        suffixes=(".zip",),
    ),
    UnsupportedFormat(
        "a 7z or rar archive",
        '7z x "{file}", and open the files in it',
        magic=((0, b"7z\xbc\xaf\x27\x1c"), (0, b"Rar!\x1a\x07")),
        suffixes=(".7z", ".rar"),
    ),
    UnsupportedFormat(
        "a PDF document",
        'camelot.read_pdf("{file}")[0].df.to_csv("{stem}.csv") for a table',
        magic=((0, b"%PDF-"),),
        suffixes=(".pdf",),
    ),
    UnsupportedFormat(
        "a pointer of Git LFS, in place of the data",
        "git lfs pull",
        magic=((0, b"version https://git-lfs.github.com/spec/"),),
    ),
    UnsupportedFormat(
        "a pointer of git-annex, in place of the data", "git annex get, or datalad get", begin=rb"/annex/objects/\w+"
    ),
)
"""Formats without a reader."""
