# docker build -t lightning_distrec .
# docker run --shm-size=2g lightning_distrec fit --config recipes/criteo_dlrm/cpu.yaml
# For GPUs, where fbgemm cannot be imported without a driver: --build-arg FBGEMM=fbgemm-gpu==1.8.0 --build-arg STEPS=install
FROM python:3.12-slim
ARG TORCH=torch==2.13.0
ARG FBGEMM=fbgemm-gpu-cpu==1.8.0
ARG STEPS="install check"
ENV PIP_NO_CACHE_DIR=1
COPY . /source
RUN /source/docker/install.sh $STEPS
WORKDIR /job
RUN cp -r /source/recipes .
ENTRYPOINT ["lightning-distrec"]
